"""What each component does in a run, one worker class for each role."""
