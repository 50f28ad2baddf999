"""What `lemma doctor` tries: one small real action for each part that Lemma can use, and what repairs a broken one."""
