"""How a policy's weights travel: cut into buckets (``plan``), sent (``sender``; from within ranks: ``learner_side``)
over a group (``group``) or on a shared device (``ipc``), received into an engine (``receiver``), and proved equal."""
