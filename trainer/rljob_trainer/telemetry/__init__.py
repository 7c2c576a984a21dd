"""What a run tells about itself: metric names, batch metrics, sinks, timing, live view, summary and report."""
