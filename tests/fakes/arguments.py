"""The flags of vLLM's server that this project uses; any other ends the process as vLLM's parser does."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VALUES = {  # flag -> type of its value
    "--host": str,
    "--dtype": str,
    "--quantization": str,
    "--reasoning-parser": str,
    "--tensor-parallel-size": int,
    "--pipeline-parallel-size": int,
    "--data-parallel-size": int,
    "--gpu-memory-utilization": float,
    "--max-num-batched-tokens": int,
    "--block-size": int,
    "--seed": int,
    "--uvicorn-log-level": str,
    "--generation-config": str,
    "--tokenizer": str,
    "--load-format": str,
    "--kv-cache-dtype": str,
    "--distributed-executor-backend": str,
}
_SWITCHES = (
    "--enable-expert-parallel",
    "--enforce-eager",
    "--trust-remote-code",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--enable-log-requests",
    "--async-scheduling",
    "--disable-uvicorn-access-log",
    "--disable-log-stats",
)


@dataclass(frozen=True)
class Arguments:
    """What the stand-in needs of vLLM's command line."""

    model: Path
    served_name: str
    host: str
    port: int
    max_model_len: int
    max_num_seqs: int
    engines: int
    reasoning_parser: str | None
    speculation: dict[str, Any]
    transfer: dict[str, Any]

    @property
    def extraction_layers(self) -> list[int]:
        """Layer ids that an extraction server captures; empty for any other."""
        if self.speculation.get("method") != "extract_hidden_states":
            return []
        ids: list[int] = self.speculation["draft_model_config"]["hf_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        return ids

    @property
    def staging(self) -> Path:
        """Where an extraction server writes."""
        return Path(self.transfer["kv_connector_extra_config"]["shared_storage_path"])

    @property
    def speculative_tokens(self) -> int:
        """Tokens a draft proposes per step; 0 without one."""
        return int(self.speculation["num_speculative_tokens"]) if self.speculation else 0


def parse(argv: list[str]) -> Arguments:
    """Read vLLM's command line; exits with 2 and vLLM's words on an unknown flag."""
    parser = argparse.ArgumentParser(prog="api_server.py", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--kv-transfer-config", type=json.loads, default={})
    for flag, kind in _VALUES.items():
        parser.add_argument(flag, type=kind)
    for flag in _SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction)
    found = parser.parse_args([_dashed(one) for one in argv])
    return Arguments(
        model=found.model,
        served_name=(found.served_model_name or [str(found.model)])[0],
        host=found.host or "0.0.0.0",
        port=found.port,
        max_model_len=found.max_model_len or _context_of(found.model),
        max_num_seqs=found.max_num_seqs,
        engines=found.data_parallel_size or 1,
        reasoning_parser=found.reasoning_parser,
        speculation=found.speculative_config,
        transfer=found.kv_transfer_config,
    )


def _dashed(argument: str) -> str:
    """vLLM takes `--max_model_len` for `--max-model-len`; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _context_of(model: Path) -> int:
    config = model / "config.json"
    return (
        int(json.loads(config.read_text()).get("max_position_embeddings", 2048)) if config.is_file() else 2048
    )
