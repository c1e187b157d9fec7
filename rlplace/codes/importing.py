"""Codes of `plan import`: what cannot be read of another library's settings, and what does not hold in them."""

from __future__ import annotations

from collections.abc import Mapping

# code -> what it means, an example, what to do
IMPORTING: Mapping[str, tuple[str, str, str]] = {
    # what cannot be read
    "import-library": ("no importer knows this library", "import openrlfh ...", "use a name that the error lists"),
    "import-source": (
        "nothing was given to import, or no such file",
        "import verl nowhere.yaml",
        "a file, or the flags or overrides themselves",
    ),
    "import-empty": (
        "nothing in the settings says who has which accelerators",
        "a file that includes the one with the sizes",
        "import the whole command, or the composed file",
    ),
    "import-yaml": ("the file is not a block of YAML keys", "a list at the top", "import the config file itself"),
    "import-quote": ("a quote is opened and never closed", "--model 'llama", "close the quote"),
    "import-flag-value": ("a flag stands without its value", "--actor_num_nodes --zero_stage 3", "--actor_num_nodes 1"),
    "import-value": (
        "a value is not of the kind that the setting takes",
        "--actor_num_nodes $NODES with NODES set nowhere",
        "write the value",
    ),
    # what does not hold in the original
    "import-component": (
        "a component there has none here, and is left out",
        "component_placement: {logger: 0}",
        "place what it does on a component of its own, or leave it out",
    ),
    "import-counts": (
        "sizes there contradict each other",
        "models on 24 accelerators in all, 16 of them declared",
        "the nearest sizes that agree are proposed",
    ),
    "import-engines": (
        "engines x their size are not the accelerators they share with the actor",
        "4 engines x 4 beside 8 actor accelerators",
        "the nearest numbers that agree are proposed",
    ),
    "import-partners": (
        "partners that share must have one size there",
        "--ref_num_gpus_per_node 4 beside --actor_num_gpus_per_node 8",
        "give both one size, or keep both: here they may differ",
    ),
    "import-batches": (
        "samples do not divide into optimizer steps",
        "1000 samples in steps of 128",
        "the nearest batch that divides is proposed",
    ),
    "import-sleep": (
        "sleeping engines contradict another setting, or it has no effect",
        "--vllm_enable_sleep without --colocate_all_models",
        "leave out one of the two",
    ),
}
