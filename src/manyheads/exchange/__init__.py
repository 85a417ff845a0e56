"""Weights in from and out to other projects: the only place where foreign names appear."""

ENCODER, HEAD, DECODER = "encoder.onnx", "head.onnx", "decoder.onnx"  # files of exchange/onnx.py
