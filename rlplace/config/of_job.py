"""The class of the config of each shipped job."""

from __future__ import annotations

from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.fields import ByJob, JobName, other_job
from rlplace.config.schema import Config

_CONFIGS = ByJob(simulator=SimulatorJobConfig, language_model=LanguageModelJobConfig)


def config_of(job: JobName) -> type[Config]:
    """Return the dataclass of the config of this job."""
    found: type[Config] = _CONFIGS[job]
    return found


def named_configs() -> dict[str, type]:
    """Return name -> dataclass of the config, for the shipped jobs that a config names by the key `job`."""
    # Imported here: this config is made of blocks that are read by those who import this module
    from rlplace.config.blocks.off_policy import OffPolicyBlocks

    return {"off_policy": OffPolicyBlocks}


def same_block(block: type, job: JobName) -> type:
    """Return the dataclass that the other job has in place of `block`: its own config for a config, else the same."""
    if issubclass(block, Config):
        return config_of(other_job(job))
    return block
