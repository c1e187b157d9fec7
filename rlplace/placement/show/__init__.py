"""Show a plan as text, JSON, SVG and HTML; explain it; compare it with another one."""
