"""Is the claimed epsilon true? Attacks on clipless through its public API, and what they prove: lower bounds on epsilon.

`play` and `judge_step` attack one step, `play_runs` and `judge_runs` whole trainings of a tiny model, `one_run` and
`judge_canaries` a single training of any classifier, and `play_model` one step of any small model. docs/audit.md says what
each assumes.
"""

from clipless.auditing.family import SampledGaussian
from clipless.auditing.fit import Finding, gaussian_fit
from clipless.auditing.gauss import CanaryTrace, gauss_epsilon, gauss_kappa
from clipless.auditing.model_game import ModelGame, play_model
from clipless.auditing.one_run import Canaries, Seen, one_run
from clipless.auditing.one_run_bounds import gaussian_mu, mahloujifar_epsilon, steinke_epsilon
from clipless.auditing.rates import Rates, clopper_pearson, plain_epsilon
from clipless.auditing.run_game import RunGame, Trainings, judge_runs, play_runs
from clipless.auditing.step_game import Releases, StepGame, play
from clipless.auditing.verdict import CanaryVerdict, Verdict, judge_canaries, judge_step

__all__ = [
    "Canaries",
    "CanaryTrace",
    "CanaryVerdict",
    "Finding",
    "ModelGame",
    "Rates",
    "Releases",
    "RunGame",
    "SampledGaussian",
    "Seen",
    "StepGame",
    "Trainings",
    "Verdict",
    "clopper_pearson",
    "gauss_epsilon",
    "gauss_kappa",
    "gaussian_fit",
    "gaussian_mu",
    "judge_canaries",
    "judge_runs",
    "judge_step",
    "mahloujifar_epsilon",
    "one_run",
    "plain_epsilon",
    "play",
    "play_model",
    "play_runs",
    "steinke_epsilon",
]
