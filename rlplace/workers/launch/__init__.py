"""Start the workers of a plan, verify where they are, call their methods, and end them."""
