"""HTTP APIs of LibreTranslate, DeepL and OpenAI for a run, with continuous batching."""
