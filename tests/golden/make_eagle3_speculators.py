"""Writes eagle3_speculators.safetensors: what small random EAGLE-3 heads of speculators 0.9.0 answer at depths 1 to 5.

README.md says which packages it needs and what the file holds. Nothing of alphaprof is used.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

DEPTHS, DOCUMENTS, TOKENS = 5, 2, 14  # tokens with features; every document has one more
VOCAB, DRAFT_VOCAB, HIDDEN = 100, 40, 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[
    str, dict[str, Any]
] = {  # what differs from `plain`: in the head's config, and under `layer` in that of its layers
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all_norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "full_vocabulary": {"draft_vocab_size": VOCAB},
    "two_states": {"eagle_aux_hidden_state_layer_ids": [2, 5]},
    "two_layers": {"layer": {"num_hidden_layers": 2}},
    "biases_and_wide_heads": {"layer": {"attention_bias": True, "head_dim": 16}},
    "rope": {"layer": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}}},
    "qwen3": {"layer": {"model_type": "qwen3"}},
}


def layer_config(model_type: str = "llama", **settings: Any) -> LlamaConfig | Qwen3Config:
    """The shape of the head's layers; eager attention, since the default one cannot run on a CPU."""
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    base = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type](**(base | shape | settings))
    config._attn_implementation = "eager"
    return config


def random_head(variant: dict[str, Any], embedding: torch.Tensor) -> Eagle3DraftModel:
    """A head whose every weight is random: norms around 1, a draft vocabulary drawn without replacement."""
    method = GreedyTokenProposalConfig(speculative_tokens=3)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    settings = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]} | variant
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(**settings.pop("layer", {})),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
        ),
        **settings,
    )
    head = Eagle3DraftModel(config).eval().float()
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 and "bias" not in name else 0.0, std=0.15)
    head.embed_tokens.weight.data = embedding.clone()
    if head.d2t is not None:
        ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        head.load_vocab_mappings(
            torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(DRAFT_VOCAB)
        )
    return head


@torch.no_grad()
def logits_by_depth(head: Eagle3DraftModel, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[depth, document, base, draft vocabulary]: NaN where the depth reads a token after the end of the document."""
    rows = []
    hook = head.lm_head.register_forward_hook(lambda _module, _inputs, output: rows.append(output[0]))
    for row, text in zip(features, ids, strict=True):
        document = torch.zeros(1, TOKENS, dtype=torch.long)
        head(hidden_states=row[None], input_ids=text[None, 1:], document_ids=document, ttt_steps=DEPTHS)
    hook.remove()
    logits = torch.stack(rows).view(DOCUMENTS, DEPTHS, TOKENS, -1).transpose(0, 1).contiguous()
    for depth in range(1, DEPTHS + 1):
        logits[depth - 1, :, TOKENS - depth + 1 :] = torch.nan
    return logits


def main() -> None:
    """Write the file named on the command line."""
    torch.manual_seed(20)
    ids = torch.randint(VOCAB, (DOCUMENTS, TOKENS + 1))
    features, embedding = torch.randn(DOCUMENTS, TOKENS, 3 * HIDDEN), torch.randn(VOCAB, HIDDEN)
    tensors, configs = {"ids": ids, "features": features, "embed_tokens.weight": embedding}, {}
    for name, variant in VARIANTS.items():
        head = random_head(variant, embedding)
        states = head.fc.in_features
        tensors[f"{name}/logits"] = logits_by_depth(head, features[..., :states], ids)
        with tempfile.TemporaryDirectory() as folder:
            head.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
            configs[name] = (Path(folder) / "config.json").read_text()
        assert torch.equal(saved.pop("embed_tokens.weight"), embedding)
        tensors |= {f"{name}/{key}": tensor for key, tensor in saved.items()}
    save_file(tensors, sys.argv[1], {"configs": json.dumps({name: json.loads(text) for name, text in configs.items()})})


if __name__ == "__main__":
    main()
