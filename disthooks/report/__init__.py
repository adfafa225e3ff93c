"""What happens during and after a run: looking at a model while it runs, reading a log, the verdict, and the pages.

``watch`` looks at a model while it runs. A log goes through four steps here. It is read (``lines``, ``record``,
``log``), what moved is detected (``moved``, ``known``), the evidence is joined (``episodes``, ``timeline``), and the
verdict is said (``sentences``, ``unseen``, ``summary``, ``document``; ``diff`` for two runs). ``page`` has the pages.
"""
