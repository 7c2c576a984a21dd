"""What the OpenAI-compatible endpoint costs before an engine of fixed speed. See the README."""
