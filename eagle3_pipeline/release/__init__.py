"""From a measured draft to the folder that vLLM serves: gate, verification, model card, provenance."""
