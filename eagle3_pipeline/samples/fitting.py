"""Whether the hidden states will fit, and if not, which choices would make them fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.byte_plan import FORMS, BytePlan
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
    validation_share: float
    room: StateRoom

    @classmethod
    def of(cls, lineage: Lineage, plan: BytePlan) -> "Fit":
        """The plan with the recipe's waves and the room of this moment, less what lies in the staging folder.

        States on their way are whole and bfloat16, whatever their form will be.
        """
        recipe = lineage.recipe
        on_their_way = min(
            int(recipe.extraction.staging_gib * 2**30), sum(plan.in_form(*FORMS["bf16"]).missing)
        )
        room = state_room(lineage)
        if on_their_way:
            why = f"{room.why}, and {gib(on_their_way)} are for states on their way (extraction.staging_gib)"
            room = StateRoom(room.bytes - on_their_way, why)
        return cls(plan, recipe.extraction.waves, recipe.training.validation_share, room)

    @property
    def wave_plan(self) -> WavePlan:
        """The waves, whether they fit or not."""
        return plan_waves(self.plan, self.waves, self.validation_share, self.room.bytes)

    @property
    def fits(self) -> bool:
        """Whether the fullest moment has room."""
        return self.wave_plan.needed <= self.room.bytes

    def choices(self) -> list[str]:
        """Settings, each of which alone would do."""
        return list(_choices(self))


def require_room(fit: Fit) -> WavePlan:
    """The waves; raises NotEnoughRoom, with the choices that fit."""
    waves = fit.wave_plan
    if waves.needed > fit.room.bytes:
        raise NotEnoughRoom(f"{in_words(fit)}, but {fit.room.why}. Choices: {'; '.join(fit.choices())}.")
    return waves


def in_words(fit: Fit) -> str:
    """What the states take in which form, as the beginning of a sentence."""
    plan, waves = fit.plan, fit.wave_plan
    layout = plan.layout
    form = layout.precision if layout.kept == "all" else f"{layout.precision}, kept: {layout.kept}"
    what = f"the hidden states of {plan.tokens} tokens ({form}) still take {gib(sum(plan.missing))}"
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
    in_waves = replace(fit, waves="auto")
    if fit.waves != "auto" and in_waves.fits:
        count = len(in_waves.wave_plan.waves)
        yield f"extraction.waves: auto ({count} waves; training sees each of them once per pass)"
    if shards := _most(len(plan.shards) - 1, lambda count: fits(_first(plan, count))):
        yield f"run.shards: {shards} of {len(plan.shards)}"
    longest = _most(plan.longest - 1, lambda tokens: fits(replace(plan, longest=tokens)))
    if _samples(plan, longest) * 2 >= _samples(plan, plan.longest):  # with fewer it is another set
        yield f"extraction.max_sample_tokens: {longest} (is {plan.longest})"
    of = len(plan.layout.layer_ids)
    if (layers := _most(of - 1, lambda count: fits(_with_layers(plan, count)))) >= 2:
        yield f"{layers} extraction.layers (are {of})"
    enlarge = "raise storage.max_gib, " if "max_gib" in fit.room.why else ""
    yield f"{enlarge}free space or point EAGLE3_STORAGE to a larger disk"


def _samples(plan: BytePlan, longest: int) -> int:
    """Samples that still train when they are cut to `longest`."""
    return sum(prompt < min(total, longest) for one in plan.shards for prompt, total in one.lengths)


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
