"""``sidco-ddp report``: what runs of ``train.py`` came to, as the paper measures it, in tables and pictures."""
