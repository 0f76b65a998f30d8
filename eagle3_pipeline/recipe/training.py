"""Settings of the training: the loop, the draft's shape, and alternatives to compare."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.recipe.strict import Share, Strict

LossName = Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]
AlternativeName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
# What makes acceptance lengths comparable, and what changes no weight.
_SAME_IN_A_SWEEP = ("test_time_steps", "checkpoint_every_s", "sweep", "draft_layers")
# The one setting of an alternative that is not of this section: `vocabulary.draft_tokens`.
_DRAFT_TOKENS = "draft_tokens"
_ROOM_FOR_ALL = (
    "Make room for all at once: fewer run.shards, extraction.precision fp8, extraction.kept trained, or a "
    "larger disk."
)


class Rates(Strict):
    """Learning rates of the draft's parts, as shares of `training.learning_rate`; 0 freezes a part."""

    fusion: Annotated[float, Field(ge=0)] = 1.0
    """The projection that joins the target's layers, with their norms."""
    layer: Annotated[float, Field(ge=0)] = 1.0
    """The decoder layer, with its norms."""
    norm: Annotated[float, Field(ge=0)] = 1.0
    """The final norm."""
    head: Annotated[float, Field(ge=0)] = 1.0
    """The output head, where `training.train_head` is set."""


class Training(Strict):
    """How the draft is trained."""

    epochs: PositiveInt = 3
    """Passes over all samples."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate; it warms up linearly and falls as a cosine."""
    rates: Rates = Rates()
    """Learning rates of single parts. A pretrained draft forgets less where its head moves slowly."""
    warmup_share: Share = 0.05
    """Share of the steps that warm up."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` takes Muon for matrices other than the head, and AdamW for the rest."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The optimizer's decoupled weight decay."""
    pull_to_start: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay toward the weights that training starts from, against forgetting a base draft."""
    max_gradient_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    tokens_per_step: PositiveInt = 2048
    """Tokens packed into one optimizer step, of all processes together."""
    accumulation: PositiveInt = 1
    """Batches that one process goes through per step; more of them are smaller and need less memory."""
    loss: LossName = "kl_div"
    """Distance between the draft's and the target's distribution; speculators' names. `tv`, `nla` and
    `lk_hybrid` aim at the acceptance rate of sampling."""
    test_time_steps: PositiveInt = 3
    """Steps that the draft runs on its own states in training; as many as tokens are speculated."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of each further test-time step's loss, relative to the one before."""
    train_head: bool = True
    """Train the draft's output head as well; otherwise it stays the target's rows."""
    per_layer_norm: bool = True
    """Norm the state of each layer before they are joined (EAGLE-3.1). A base draft keeps its own norms."""
    norm_output: bool = False
    """Feed the normed output back in further steps (EAGLE-3.1). A base draft keeps its own norms."""
    norm_before_residual: bool = True
    """The draft's layer adds to the normed state. SGLang and SpecForge know only drafts without this and
    without `per_layer_norm`. A base draft keeps its own norms."""
    attention_window: PositiveInt | None = None
    """The draft looks back so many tokens; at all when left out. A base draft keeps its own attention."""
    intermediate_size: PositiveInt | None = None
    """Width of the draft's MLP; the target's when left out. A base draft keeps its own."""
    patience: PositiveInt | None = None
    """Training ends after so many epochs without a better acceptance length; never early when left out. Not
    for waves."""
    checkpoint_every_s: PositiveFloat = 120
    """Seconds between checkpoints; each epoch's end has one too."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of weights and order."""
    draft_layers: Literal[1] = 1
    """Decoder layers of the draft; EAGLE-3 has one."""
    sweep: dict[AlternativeName, dict[str, Any]] = Field(default_factory=dict)
    """Alternatives by name, each with the settings of this section in which it differs (`{}`: in none), and
    `draft_tokens` for a smaller vocabulary. All are trained, and the one with the longest simulated
    acceptance goes on."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        rates = self.rates.model_dump()
        if not any(rate for part, rate in rates.items() if part != "head" or self.train_head):
            head = "" if self.train_head or not rates["head"] else " but head, and train_head is false"
            raise ValueError(f"training.rates has 0 for all parts{head}: nothing is trained. Set one above 0")
        return self

    @model_validator(mode="after")
    def _window_is_wider_than_a_draft(self) -> Self:
        window, steps = self.attention_window, self.test_time_steps
        if window is not None and window <= steps:
            raise ValueError(
                f"training.attention_window is {window}, training.test_time_steps {steps}: drafted tokens "
                "alone would fill the window. Set it well above, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _alternatives_are_trainings(self) -> Self:
        for name in self.sweep:
            self.alternative(name)
            self.draft_tokens_of(name)
        return self

    def alternative(self, name: str) -> "Training":
        """The settings of one alternative of the sweep; raises ValueError where it has none such."""
        changes = {key: value for key, value in self.sweep[name].items() if key != _DRAFT_TOKENS}
        if fixed := sorted(set(changes) & set(_SAME_IN_A_SWEEP)):
            raise ValueError(
                f"training.sweep.{name} sets {', '.join(fixed)}, which alternatives share: remove it"
            )
        shared = self.model_dump(exclude={"sweep"})
        if isinstance(changes.get("rates"), dict):
            changes["rates"] = shared["rates"] | changes["rates"]
        try:
            return Training.model_validate(shared | changes)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ValueError(f"training.sweep.{name}: {found}") from error

    def draft_tokens_of(self, name: str) -> int | None:
        """The size of vocabulary that one alternative asks for; None where it takes the recipe's."""
        found = self.sweep[name].get(_DRAFT_TOKENS)
        if found is not None and (type(found) is not int or found < 1):
            raise ValueError(f"training.sweep.{name}.draft_tokens is {found!r}, expected a number above 0")
        return found

    def require_one_wave(self, waves: int) -> None:
        """Raise RecipeError where so many waves are too many: for alternatives, or to end early."""
        if waves <= 1:
            return
        if self.sweep:
            raise RecipeError(
                f"training.sweep compares {len(self.sweep)} trainings on the same states, but these are made "
                f"in {waves} waves, each of which is deleted before the next one (extraction.waves). "
                f"{_ROOM_FOR_ALL} Or remove training.sweep."
            )
        if self.patience is not None:
            raise RecipeError(
                f"training.patience is {self.patience}, but states are made in {waves} waves "
                "(extraction.waves): a training that ends early would never have seen the later ones. "
                f"{_ROOM_FOR_ALL} Or remove training.patience."
            )
