"""The Python interface: functions that train, plan and search, and objects for runs."""
