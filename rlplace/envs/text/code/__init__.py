"""Runs code that a model wrote against tests. The code can neither forge a result nor damage the run.

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
| `judge`, `stand_ins` | represent the answer's objects in the judge process |
| `names` | decides which names of the answer a test gets |
| `answer` | runs the code in the answer process, and serves requests of the judge |
| `confine` | removes all other rights of the answer process |
| `wire` | encodes the values that both processes exchange |
"""
