"""Whether the hidden states will fit, and if not, which choices would make them fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.byte_plan import FORMS, BytePlan
from eagle3_pipeline.samples.leftovers import Leftover, leftovers, what_to_delete
from eagle3_pipeline.samples.state_room import StateRoom, gib, state_room
from eagle3_pipeline.samples.wave_plan import WavePlan, plan_waves

_FORMS_IN_WORDS = {
    "bf16 trained": "extraction.kept: trained",
    "fp8": "extraction.precision: fp8",
    "fp8 trained": "extraction.precision: fp8 with extraction.kept: trained",
}


@dataclass(frozen=True)
class Fit:
    """A plan of bytes beside the room that there is."""

    plan: BytePlan
    waves: int | str
    room: StateRoom
    layers_are_fixed: bool = False
    """A base draft takes in these layers and no others."""
    leftovers: tuple[Leftover, ...] = ()

    @classmethod
    def of(cls, lineage: Lineage, plan: BytePlan) -> "Fit":
        """The plan with the recipe's waves and the room of this moment, less what lies in the staging folder.

        States on their way are whole and bfloat16, whatever their form will be.
        """
        recipe = lineage.recipe
        room = state_room(lineage)
        # Files that come with the replies are in the plan, on their way or not.
        staging = 0 if plan.while_generating else int(recipe.extraction.staging_gib * 2**30)
        if on_their_way := min(staging, plan.to_come):
            why = f"{room.why}, and {gib(on_their_way)} are for states on their way (extraction.staging_gib)"
            room = StateRoom(room.bytes - on_their_way, why)
        return cls(
            plan,
            recipe.extraction.waves,
            room,
            layers_are_fixed=recipe.base_draft is not None,
            leftovers=tuple(leftovers(lineage)),
        )

    @cached_property
    def wave_plan(self) -> WavePlan:
        """The waves, whether they fit or not."""
        return plan_waves(self.plan, self.waves, self.room.bytes)

    @property
    def fits(self) -> bool:
        """Whether the fullest moment has room. A disk too full for anything else does for what is there."""
        return self.wave_plan.needed <= max(self.room.bytes, 0)

    def choices(self) -> list[str]:
        """Settings, each of which alone would do."""
        return list(_choices(self))


def require_room(fit: Fit) -> WavePlan:
    """The waves; raises NotEnoughRoom, with the choices that fit."""
    waves = fit.wave_plan
    if not fit.fits:
        raise NotEnoughRoom(f"{in_words(fit)}, but {fit.room.why}. Choices: {'; '.join(fit.choices())}.")
    return waves


def in_words(fit: Fit) -> str:
    """What the states take in which form, as the beginning of a sentence."""
    plan, waves = fit.plan, fit.wave_plan
    layout = plan.layout
    form = layout.precision if layout.kept == "all" else f"{layout.precision}, kept: {layout.kept}"
    what = f"the hidden states of {plan.tokens} tokens ({form}) still take {gib(sum(plan.missing))}"
    if plan.while_generating:
        return f"{what}, and {gib(waves.needed)} with the files that wait for their shards"
    if len(waves.waves) == 1:
        return what
    return f"{what}; in {len(waves.waves)} waves, the largest with validation samples {gib(waves.needed)}"


def _choices(fit: Fit) -> Iterator[str]:
    plan = fit.plan

    def fits(changed: BytePlan) -> bool:
        return replace(fit, plan=changed).fits

    for name, words in _FORMS_IN_WORDS.items():
        changed = plan.in_form(*FORMS[name])
        if changed.bytes < plan.bytes and fits(changed):
            yield f"{words} ({gib(changed.bytes)} in all)"
    if plan.while_generating:
        if fits(replace(plan, while_generating=False)):
            yield "extraction.while_generating: false"
    elif fit.waves != "auto" and (in_waves := replace(fit, waves="auto")).fits:
        count = len(in_waves.wave_plan.waves)
        yield f"extraction.waves: auto ({count} waves; training sees each of them once per pass)"
    if shards := _most(len(plan.shards) - 1, lambda count: fits(_first(plan, count))):
        yield f"run.shards: {shards} of {len(plan.shards)}"
    longest = _most(plan.longest - 1, lambda tokens: fits(replace(plan, longest=tokens)))
    cut = replace(plan, longest=longest)
    if cut.trained_samples * 2 >= plan.trained_samples:  # with fewer it is another set
        yield f"extraction.max_sample_tokens: {longest} (is {plan.longest})"
    of = len(plan.layout.layer_ids)
    layers = 0 if fit.layers_are_fixed else _most(of - 1, lambda count: fits(_with_layers(plan, count)))
    if layers >= 2:
        yield f"{layers} extraction.layers (are {of})"
    if fit.leftovers:
        yield what_to_delete(fit.leftovers)
    enlarge = "raise storage.max_gib, " if "max_gib" in fit.room.why else ""
    yield f"{enlarge}free space or point EAGLE3_STORAGE to a larger disk"


def _first(plan: BytePlan, shards: int) -> BytePlan:
    return replace(plan, shards=plan.shards[:shards])


def _with_layers(plan: BytePlan, count: int) -> BytePlan:
    return replace(plan, layout=replace(plan.layout, layer_ids=plan.layout.layer_ids[:count]))


def _most(highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `highest` that fits, 0 where none does."""
    low = 0
    while low < highest:
        middle = (low + highest + 1) // 2
        low, highest = (middle, highest) if fits(middle) else (low, middle - 1)
    return low
