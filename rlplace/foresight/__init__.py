"""What a plan will take: profiles of work that was measured, and a run on a logical clock that they time."""
