"""Usage of slots, counted one read at a time in Python numbers."""

import math


def usage(reads, n_slots):
    """Figures of (slot, weight) pairs; weights >= 0, at least one positive."""
    count, mass, used = [0] * n_slots, [0.0] * n_slots, set()
    for slot, weight in reads:
        count[slot] += 1
        mass[slot] += weight
        if weight != 0:
            used.add(slot)
    crowded = sum(1 for slot, _ in reads if count[slot] > 1)
    found = {
        "used_pct": 100 * len(used) / n_slots,
        "coverage": sum(1 for n in count if n) / n_slots,
        "collision_ratio": crowded / len(reads),
        "n_reads": len(reads),
    }
    for name, amounts in (("w", mass), ("u", count)):
        total = math.fsum(amounts)
        kl, gini, below = math.log(n_slots), 1.0, 0.0
        for amount in sorted(amounts):
            share = amount / total
            below += share
            gini -= 2 * below / n_slots
            if share > 0:
                kl += share * math.log(share)
        found |= {f"kl_{name}": kl, f"gini_{name}": gini}
        for percent in (50, 90, 99):
            heavy, held = 0, 0.0
            for amount in sorted(amounts, reverse=True):
                if held > total * percent / 100:
                    break
                held += amount
                heavy += 1
            found[f"top{percent}_{name}"] = heavy
    return found
