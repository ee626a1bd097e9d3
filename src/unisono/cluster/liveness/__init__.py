"""Who is alive: status servers, the peer monitor, the watchdog, the heartbeat file."""
