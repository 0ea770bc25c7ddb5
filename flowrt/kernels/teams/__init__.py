"""What threads of a CUDA block do together for twins: how they stand, and reductions of all forms.

Law: it sees entries, sizes and what combines two of them, never an op. It knows `language`.
"""
