"""A training API over HTTP that speaks the protocol of the `tinker` client."""
