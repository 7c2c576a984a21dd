"""What one sample of a prompt comes to: its name (``identity``), its tokens and what is known of each (``tokens``)."""
