"""Words for what is wrong with a placement text, made when the text has been read."""
