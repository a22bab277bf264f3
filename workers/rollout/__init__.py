"""The rollout role: a policy that answers under the newest weights. Imports torch when used."""
