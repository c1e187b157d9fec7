"""Runs code that a model wrote against tests, so that the code can neither forge a result nor hurt the run.

::

    grader process          judge process                      answer process
    run_checks(code, …) ──────▶ forks a starter first ───────▶ forked and confined by the starter
                                reads code and checks          runs the code
                                runs the tests; a call of      the function runs here,
                                the code's function    ◀─────▶ arguments and results are data
    number of passed  ◀──────── one line for each check

The answer process knows neither the tests nor the pipe of the report. It sends plain data only, which the judge
compares with what the tests expect.

| module | what it does |
| --- | --- |
| `fences`, `forms` | find the code in an answer, and the checks in tests of public data sets |
| `runner` | starts the judge process, waits for its report |
| `process`, `starter` | main programs of the judge process and of the process that forks answers |
| `trial` | runs the checks in the judge process |
| `judge`, `stand_ins`, `offered` | the answer's objects in the judge process, and which of its names tests get |
| `answer`, `confine` | serves the judge in the answer process; takes the process everything else |
| `wire` | values as data between both |
"""
