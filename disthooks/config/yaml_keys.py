"""The keys of a configuration, as pydantic's models: a new key is a field here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1)]
# A pattern for editors alone. When a file is read, parse_bytes checks sizes, with a better message.
SIZE = r"^\s*\d+(\.\d+)?\s*(([kKmMgGtT][iI]?)?[bB])?$"
Size = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1, json_schema_extra={"pattern": SIZE})]
Entry = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Save(_Strict):
    """Which modules, and where what they save for backward goes."""

    modules: Text | Annotated[list[Text], Field(min_length=1, json_schema_extra={"uniqueItems": True})] = Field(
        description="One pattern or a list of them, over names of modules; * matches any text, dots included."
    )
    at_least: Size | None = Field(None, description="Tensors of fewer bytes stay where they are: 65536, 64 KiB.")
    recompute: Entry | None = Field(None, description="Drop what is cheap to compute again: kind: Recompute.")
    codecs: list[Entry] = Field([], description="What makes tensors smaller, in this order.")
    store: Entry = Field(description="Where they are between forward and backward.")
    selective_checkpoints: bool = Field(True, description="Whether what a selective checkpoint keeps goes there, too.")


class _Watchers(_Strict):
    """The keys that stand beside ``watch`` or in it."""

    blame: bool = Field(
        False, description="true: name the first module whose output is infinite or NaN, and the rank, on stderr."
    )
    check_replicas: Annotated[int, Field(ge=1)] | None = Field(
        None, description="After each so many steps, compare what should be the same on several ranks, bit for bit."
    )


#: The statistics of `stats.standard()` or of `stats.full()`.
Bundle = Literal["standard", "full"]


class Watch(_Watchers):
    """What happens to gradients before the optimizer steps; the arguments of disthooks.gradients."""

    every: Annotated[int, Field(ge=1)] = Field(50, description="Steps 0, every, 2 * every ... are logged.")
    recent: Annotated[int, Field(ge=0)] = Field(
        0, description="So many steps that are not logged stay on the device, and are logged if something happens."
    )
    groups: dict[Text, Text | Annotated[list[Text], Field(min_length=1)]] = Field(
        {}, description="Names of groups of parameters, and the patterns of each."
    )
    optimizers: Literal["apart", "together"] = Field(
        "apart", description="together: under disthooks run, several optimizers of a model make one step together."
    )
    process_group: Literal["world"] | None = Field(
        None, description="world: all ranks make one step together, also those of other stages of a pipeline."
    )
    experts: Text | Annotated[list[Text], Field(min_length=1)] | None = Field(
        None, description="Patterns of the parameters of which each rank has its own, and which the engine ignores."
    )
    copies: Text | Annotated[list[Text], Field(min_length=1)] | None = Field(
        None, description="Patterns of the parameters that several ranks have alike, without an engine that knows it."
    )
    restore_buffers: bool = Field(
        True, description="Whether what the forwards of a skipped step wrote into buffers is put back."
    )
    rerun: bool = Field(
        False, description="Whether a step that a rule leaves out is run once more, under the HF Trainer and Lightning."
    )
    capture: Text | None = Field(
        None, description="As rerun; of a step that repeats, the call that made it bad is written to this folder."
    )
    rules: list[Entry] = Field([], description="Applied to the gradients in this order.")
    stats: Bundle | list[Bundle | Entry] = Field(
        [],
        description="What is measured in logged steps; the word standard is what one reading of the gradients gives, "
        "and full is what disthooks report draws.",
    )
    sinks: list[Entry] = Field([], description="Where it is logged, on the first rank.")


class Hooks(_Watchers):
    """A configuration of disthooks."""

    run: Text = Field(
        "runs/disthooks", description="The directory of the run, made when attached; {run} in other paths."
    )
    budget: Size | Literal["free"] | None = Field(
        None,
        description="What parameters and saved tensors may take on the device of a rank: 20 GiB. With fit also free: "
        "what is free at the first step.",
    )
    fit: bool = Field(
        False,
        description="true: budget is for all that a step has in use; how much of it stays on the device is measured.",
    )
    exact: bool = Field(False, description="true: a codec that loses anything is an error.")
    strict: bool = Field(
        False, description="true: under disthooks.run, an optimizer to whose model nothing can be attached is an error."
    )
    save: list[Save] = Field([], description="Where saved tensors are; each module in one entry only.")
    watch: Watch | None = Field(None, description="What happens to gradients, and what is logged of them.")
