"""The console command ``sidco-ddp``, over the package's public names."""
