package main

import "fmt"

// sizes measures saves and clones of idle machines of different sizes, of which the guest has touched but a little.
func (b *bench) sizes() error {
	fmt.Printf("\n### By the size of the guest\n\n| machine | written in all, MB | guest stopped p50 ms | complete and synced p50 ms | memory sealed p50 ms | machine launched p50 ms | first answer after that p50 ms |\n" +
		"| --- | --- | --- | --- | --- | --- | --- |\n")
	for i, mib := range []int64{160, 1900, 8000, 16000, 32000} { // and the guest's own part, to the next power of two
		if err := b.size(b.id("size", i), fmt.Sprintf("%dMiB", mib)); err != nil {
			return fmt.Errorf("%d MiB: %w", mib, err)
		}
	}
	return nil
}

func (b *bench) size(id, memory string) error {
	n := max(1, b.n/4)
	if err := b.idle(id, memory); err != nil {
		return err
	}
	s, err := b.save(id, n)
	if err != nil {
		return err
	}
	j, err := b.journal()
	if err != nil {
		return err
	}
	for range n {
		clone, _, err := b.must("clone", id)
		if err != nil {
			return err
		}
		if err := b.discard(clone); err != nil {
			return err
		}
	}
	launched, err := j.entries("machine launched", n)
	if err != nil {
		return err
	}
	row := fmt.Sprintf("| %s | %.0f | %.1f | %.0f |", launched[0]["shape"], quantile(s.written, 0.5), ms(s.stopped.quantile(0.5)), ms(s.took.quantile(0.5)))
	for _, msg := range []string{"copied the memory of a snapshot", "machine launched", "the agent answers"} {
		entries, err := j.entries(msg, n)
		if err != nil {
			return err
		}
		took, err := durations(entries, "took")
		if err != nil {
			return err
		}
		row += fmt.Sprintf(" %.0f |", ms(took.quantile(0.5)))
	}
	fmt.Println(row)
	return b.discard(id)
}
