"""Runs code that a model wrote against tests, so that the code can neither forge a result nor hurt the run.

::

    grader process          judge process                    answer process
    run_tests(code, checks) ──▶ reads code and checks
                                forks a starter first ─────▶ confined, then runs the code
                                runs the tests; a call of    the function runs here,
                                the code's function  ◀─────▶ arguments and results are data
    number of passed  ◀──────── one line for each check

The answer process knows neither the tests nor the pipe of the report. It sends plain data only, which the judge
compares with what the tests expect.
"""
