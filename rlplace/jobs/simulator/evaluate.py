"""Play a trained simulator policy: returns and lengths of whole episodes."""

from __future__ import annotations

import os

from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.jobs.played import played_episodes, refuse_transcripts
from rlplace.trained import Trained


def evaluate(trained: Trained, request: EvaluationRequest) -> Evaluation:
    """Play whole episodes with a trained policy. Return the returns (sums of rewards) and lengths of the episodes.

    Raises ConfigError, SimulatorError, OutputError.
    """
    refuse_transcripts(request)
    # For torch: with small batches, more threads would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rlplace.models.policy import policy_of
    from rlplace.workers.roles.episodes import read_states

    policy = policy_of(trained, seed=request.seed, key=request.key)
    states = read_states(trained.folder / "env") if trained.checkpoint else ()
    return played_episodes(
        trained,
        request,
        trained.config.env,
        policy.spaces,
        lambda observations, begins: policy.choose(
            observations, request.deterministic, begins
        ),
        states,
    )
