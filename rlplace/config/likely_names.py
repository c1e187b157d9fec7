"""Names that an unknown name probably means, found by the words in the names.

A name is cut into words, and each word becomes the word of the field for its meaning: `num_sgd_iter` and
`sgd_iterations` have the words number, sgd and iteration. Then the words of two names are compared::

    fcnet_hiddens   fcnet, hidden      hidden         hidden            all words that count are in both: sure
    patience        patience           eval_patience  eval, patience    a word is added: one to ask about
    icm_lr          icm, lr            lr             lr                a word is lost: one to ask about

So a name with a word that is lost or added is never taken for the known name: the word may change the meaning. Words
that say nothing more are left out: those of the block, such as sampling in the block rollout, and number.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Sequence

# Word -> other forms of it, in names of any library
_FORMS = {
    "accelerator": "gpu gpus device devices cuda accelerators npu",
    "activation": "act nonlinearity activations",
    "adapter": "adapters",
    "advantage": "adv advantages",
    "attention": "attn",
    "batch": "batches bs bsz bsize",
    "beta1": "b1",
    "beta2": "b2",
    "checkpoint": "ckpt checkpoints ckpts chkpt snapshot snapshots save saving saved saves",
    "clip": "clipping clipped clips",
    "coef": "coeff coefficient coefs coeffs",
    "critic": "critics vf qf",
    "decay": "decayed decaying",
    "discount": "discounted discounting",
    "end": "final last finish stop_value",
    "entropy": "ent entropies",
    "env": "envs environment environments simulator simulators",
    "episode": "episodes ep eps_count",
    "epoch": "epochs",
    "epsilon": "eps",
    "estimator": "estimators",
    "eval": "evaluation evaluate val valid validation test testing evals",
    "exploration": "explore exploring expl",
    "every": "interval freq frequency period periods each",
    "gradient": "grad grads gradients",
    "group": "groups",
    "head": "heads",
    "hidden": "hiddens",
    "high": "higher upper",
    "interface": "nic iface",
    "iteration": "iterations iter iters",
    "keep": "keeping kept retain",
    "kl": "kld",
    "lambda": "lam lambd",
    "layer": "layers",
    "length": "len lengths",
    "low": "lower",
    "lr": "learningrate alpha_lr",
    "max": "maximum most upto limit",
    "memory": "mem vram",
    "min": "minimum least",
    "minibatch": "minibatches",
    "node": "nodes machine machines",
    "noise": "noisy noises",
    "normalize": "norm normalise normalized normalised normalization normalisation normalizing",
    "number": "num n nb nr count",
    "observation": "obs observations state states",
    "offload": "offloading offloaded",
    "optimizer": "optim optimiser opt optimizers",
    "output": "out outputs",
    "folder": "dir directory path dirs folders",
    "patience": "patient",
    "penalty": "penalties",
    "policy": "policies pi",
    "port": "ports",
    "probability": "prob probs",
    "prompt": "prompts question questions",
    "quantile": "quantiles",
    "ratio": "range ratios",
    "reference": "ref",
    "replay": "buffer rb",
    "response": "responses completion completions answer answers generations",
    "resume": "restore restart_from",
    "return": "returns",
    "reward": "rewards rew",
    "sample": "samples sampled sampling",
    "schedule": "scheduler schedules annealing anneal",
    "seed": "seeds",
    "sequence": "sequences seq seqs",
    "size": "sizes dim dims dimension",
    "sink": "sinks logger loggers tracker trackers",
    "start": "initial init starting begin first starts",
    "std": "stddev deviation",
    "step": "steps",
    "target": "tgt targets",
    "temperature": "temp",
    "timeout": "timeouts",
    "token": "tokens tok toks",
    "total": "overall",
    "turn": "turns",
    "update": "updates updating",
    "value": "values v",
    "wait": "waiting",
    "warmup": "",
    "weight": "weights",
    "worker": "workers",
    "wrapper": "wrappers",
}
_WORDS = {
    form: word for word, forms in _FORMS.items() for form in (word, *forms.split())
}
# Two words that are one
_JOINED = {
    ("learning", "rate"): "lr",
    ("learn", "rate"): "lr",
    ("mini", "batch"): "minibatch",
    ("warm", "up"): "warmup",
    ("time", "out"): "timeout",
    ("check", "point"): "checkpoint",
    ("off", "load"): "offload",
    ("roll", "out"): "rollout",
    ("log", "std"): "logstd",
}
# Words that say nothing about the meaning
_FILLERS = {
    *("use", "using", "enable", "enabled", "with", "the", "do", "is", "set", "of"),
    *("second", "seconds", "sec", "secs"),
    *("param", "params", "arg", "args", "config", "cfg", "option", "s", "per", "for"),
    *("sgd", "ppo", "fcnet", "algo", "my", "by", "in", "to", "from", "on", "at"),
}
# Words that say how a thing is counted: two names with different ones mean different things
_MEASURES = {
    *("number", "size", "step", "every", "ratio", "total", "max", "length", "coef"),
    *("rate", "type", "kind", "mode", "name", "file", "folder", "value", "weight"),
    *("iteration", "epoch", "function", "fn"),
}
_MEASURE = 0.35
_BOUND = "min"
# Words that a name of the same block may have besides: seeds and num_seeds
_COUNTS = {"total", "max", "number"}
# Words of an unknown name that say no more than the name of the same block does: num_models and models
_SAID_ANYWAY = {"total", "number"}
# Words that a name of the same block may have besides, where the unknown name has none: num_warmup and warmup_steps
_UNIT = {"step"}
# Block -> words that say what the block is about: rollout.sampling_temperature
_ABOUT = {
    "rollout": {"sample", "generation", "inference", "decoding", "vllm", "engine"},
    "actor": {"policy", "training", "train", "learner"},
    "runner": {"training", "train", "run"},
    "algorithm": {"training", "train", "grpo", "iteration"},
    "checkpoint": {"iteration"},
    "serve": {"server", "serving"},
}
# Of a name in another block than that of the unknown name
_OTHER_BLOCK = 0.8
# From here a name is one to ask about: more than half of the words
_LEAST = 0.52
_LIKE = 0.85  # likeness of a word and its misspelling
_STEM = 6  # letters of a word that its forms share, such as listen and listens
_SHORTEST = 4  # letters of a word that may be misspelt


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A known name.

    `path`: its path; a leading dot: in any block. `is_whole`: whether all its words are to be there.
    """

    path: str
    is_whole: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Likely:
    """A name that may be meant. `known`: the name. `likeness`: 0 to 1. `is_sure`: whether no word is lost or added."""

    known: Known
    likeness: float
    is_sure: bool


@functools.cache
def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, each as the word of the field for its meaning: `numEnvs` -> number, env."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    parts = [part for part in re.split(r"[^a-z0-9]+", spaced) if part]
    words: list[str] = []
    for part in parts:
        pair = (words[-1] if words else "", part)
        joined = _JOINED.get(pair) or _JOINED.get((pair[0], _word(part)))
        if joined is not None:
            words[-1] = joined
            continue
        words += _split(part)
    return frozenset(words) - _FILLERS


def likely_names(name: str, above: str, known: Iterable[Known]) -> Sequence[Likely]:
    """Return the known names that an unknown name may mean, the most likely first.

    Where names are sure, others are left out. `name`: the unknown name. `above`: path of its block. `known`: all known
    names.
    """
    words = words_of(name)
    around = words_of(above)
    found: list[Likely] = []
    # A name that says nothing
    if not words:
        return found
    for each in known:
        likely = _compared(words, around, above, each)
        if likely is not None:
            found.append(likely)
        elif _is_here(each, above) and name.lower() == _initials(each.name):
            found.append(Likely(each, _LEAST, is_sure=False))
    found.sort(key=lambda likely: (not likely.is_sure, -likely.likeness))
    # Names of the same block come before those of others
    here = [likely for likely in found if _is_here(likely.known, above)]
    found = here or found
    sure = [likely for likely in found if likely.is_sure]
    if sure:
        best = sure[0].likeness
        return [likely for likely in sure if likely.likeness >= best - 0.01]
    return found


def _initials(name: str) -> str:
    """Return the first letters of the parts of a name, if there are several: wd of weight_decay; else an empty text."""
    parts = [part for part in name.split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else ""


def is_said(name: str, meaning: str) -> bool:
    """Return whether the meaning of a key has all words of a name that say something: listen, in "listens"."""
    said = {word[:_STEM] for word in re.findall("[a-z]+", meaning.lower())}
    telling = {word for word in words_of(name) if word not in _MEASURES}
    if not telling or any(len(word) < _SHORTEST for word in telling):
        return False
    return {word[:_STEM] for word in telling} <= said


def _compared(
    words: frozenset[str], around: frozenset[str], above: str, known: Known
) -> Likely | None:
    """Return how likely a known name is meant by a name of some words; None if it is not."""
    theirs = words_of(known.name)
    block = known.path.rpartition(".")[0]
    is_here = _is_here(known, above)
    if known.is_whole and words != theirs:
        return None
    # Words of the block count where the name alone does not have them: checkpoint.load, load_checkpoint
    shared = words & theirs
    tells = any(word not in _MEASURES for word in shared)
    # `every` of one block is not that of another
    is_same = words == theirs and is_here
    if not is_same and not tells:
        by_block = around & theirs
        if not (by_block and shared) or not theirs <= words | around | {"total"}:
            return None
    if not theirs:
        return None
    about = _ABOUT.get(above.partition(".")[0], set())
    lost = words - theirs - words_of(block) - about
    # A lower bound of a value is not the value
    if _BOUND in lost:
        return None
    added = theirs - words - around
    likeness = _weight((words | around) & theirs) / (
        _weight((words | around) & theirs) + _weight(lost) + 0.7 * _weight(added)
    )
    if not is_here:
        likeness *= _OTHER_BLOCK
    if likeness < _LEAST:
        return None
    if not is_here:
        return Likely(known, likeness, is_sure=not lost and not added)
    is_sure = lost <= _SAID_ANYWAY and added <= _COUNTS | _UNIT
    return Likely(known, likeness, is_sure)


def _is_here(known: Known, above: str) -> bool:
    """Return whether a known name is one of the block `above`, or of any block."""
    return not above or known.path.rpartition(".")[0] in (above, "")


def _weight(words: Iterable[str]) -> float:
    """Return how much words say: one each, and less for a word that says only how a thing is counted."""
    return sum(_MEASURE if word in _MEASURES else 1.0 for word in words)


def _word(part: str) -> str:
    """Return the word of the field for a part of a name; the part itself if it is unknown."""
    if part in _WORDS:
        return _WORDS[part]
    if part.endswith("s") and part[:-1] in _vocabulary():
        return part[:-1]
    if len(part) < _SHORTEST or part in _vocabulary():
        return part
    near = difflib.get_close_matches(part, _vocabulary(), n=1, cutoff=_LIKE)
    if near and near[0][0] == part[0]:
        return _WORDS.get(near[0], near[0])
    return part


def _split(part: str) -> list[str]:
    """Return the words of a part of a name: two, if it is two known words without a separator, such as batchsize."""
    word = _word(part)
    if word in _vocabulary() or len(part) < 2 * _SHORTEST - 1:
        return [word]
    for cut in range(3, len(part) - 2):
        first, second = part[:cut], part[cut:]
        if first in _vocabulary() and second in _vocabulary():
            return [_word(first), _word(second)]
    return [word]


@functools.cache
def _vocabulary() -> frozenset[str]:
    """Return the known words, in all forms."""
    words = {*_WORDS, *_FILLERS, *_MEASURES, *_FORMS, "rollout", "gamma", "tau"}
    return frozenset(word for word in words if "_" not in word)
