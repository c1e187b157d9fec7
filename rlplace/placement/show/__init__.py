"""A plan shown: as text, JSON, SVG and HTML; explained, and beside another one."""
