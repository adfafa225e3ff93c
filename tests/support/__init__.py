"""What tests share: models, ranks, engines, stores, torch's databases, jobs, a simulated accelerator."""

import pathlib

#: Of the repository.
ROOT = pathlib.Path(__file__).parents[2]
