"""From rows of local files and Hugging Face datasets to screened prompts in one fixed order."""
