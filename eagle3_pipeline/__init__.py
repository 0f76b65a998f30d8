"""EAGLE-3 drafts for vLLM: from a list of prompts and a target model to a draft that is proven faster.

The library behind the Dagster code location. It is imported by the vLLM server's process too
(`eagle3_pipeline.extraction.connector`), so this file imports nothing.
"""

__version__ = "0.1.0"
