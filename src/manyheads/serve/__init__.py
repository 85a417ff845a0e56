"""HTTP APIs of LibreTranslate, DeepL and OpenAI for a run, with dynamic batching."""
