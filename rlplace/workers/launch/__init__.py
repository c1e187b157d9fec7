"""Start workers where a plan wants them, verify that they are there, call their methods, and end them."""
