"""The performance model: profiles of measured work, and predictions from a run of the loop on a logical clock."""
