"""A Whisper of transformers: opened, one layer of the encoder removed, exported and loaded again.

`python examples/open_whisper.py` makes a small `WhisperForConditionalGeneration` with random weights, opens it,
measures on random features how far the outputs move without each layer of the encoder, removes the layer that moves
them least, and writes a directory whose config has one layer less.
"""

import argparse

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import graphwright as gw
from graphwright import surgery as sg

CONFIG = WhisperConfig(
    d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, num_mel_bins=8, max_source_positions=20,
    max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


def without(p: gw.Program, layer: int) -> gw.Program:
    """Return a copy of the program without both branches of a layer of the encoder."""
    copy = p.fork()
    at = f"model.encoder.layers.{layer}"
    with copy.edit(f"without layer {layer} of the encoder") as e:
        e.cut(f"{at}.self_attn.out_proj.linear -> {at}.mid")
        e.cut(f"{at}.fc2.linear -> {at}.out")
    return copy


def main(out: str) -> None:
    torch.manual_seed(0)
    WhisperForConditionalGeneration(CONFIG).save_pretrained(f"{out}/whisper")
    model = gw.open(f"{out}/whisper", tokenizer=False)
    print(model.inspect().text(depth=1))

    rng = np.random.default_rng(0)
    feeds = {
        "input_features": rng.normal(size=(4, 8, 40)).astype("f4"),
        "decoder_input_ids": rng.integers(3, 99, (4, 6)),
    }
    moved = {}
    for layer in range(CONFIG.encoder_layers):
        moved[layer] = sg.compare(model.program, without(model.program, layer), feeds).outputs["relative"]
        print(f"without layer {layer}: the logits differ by {moved[layer]:.1e}, relative")

    shorter = model.with_program(without(model.program, min(moved, key=lambda layer: moved[layer])))
    logits = shorter.outputs(**feeds)["logits"]
    receipt = shorter.export(f"{out}/shorter", check="none", timed=False)
    again = WhisperForConditionalGeneration.from_pretrained(f"{out}/shorter").eval()
    with torch.no_grad():
        found = again(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits.numpy()
    print(f"export level {receipt.level}; transformers: {again.config.encoder_layers} layers of the encoder, "
          f"logits differ by {np.abs(found - logits).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="open_whisper", help="directory of both models")
    parser.add_argument("--quick", action="store_true", help="the same, as it is short")
    main(parser.parse_args().out)
