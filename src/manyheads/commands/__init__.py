"""The commands by what they are for. torch is imported inside them, so that help is instant."""
