"""Import and export: Hugging Face, CTranslate2, ONNX. Only here are names of other projects."""

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"  # files of exchange/onnx.py
