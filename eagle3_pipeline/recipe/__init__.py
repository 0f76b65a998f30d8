"""A recipe: every choice of one job, from prompts to released draft, in one strict YAML file."""

from eagle3_pipeline.recipe.file import load_recipe, load_recipes
from eagle3_pipeline.recipe.settings import Recipe

__all__ = ["Recipe", "load_recipe", "load_recipes"]
