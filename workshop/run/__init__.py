"""Start programs, watch them and end them; describe the machine that they run on."""
