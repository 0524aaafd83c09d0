"""Where agents run: other machines by ssh, and platforms that give slots to tasks."""
