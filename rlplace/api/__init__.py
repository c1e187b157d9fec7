"""rlplace from Python: train, plan and search by a function call, and look at runs."""
