package pod

import "slices"

// sweep takes out of the other machine what had ended by the time of the save and has been deleted since: its id is to be
// used again. What is still to be deleted goes with its deletion.
func (r *rollback) sweep() error {
	for _, e := range r.from.pod.Ended {
		known := func(p pair) bool { return p.c.guestID == e.Guest && slices.Equal(p.c.disks, e.Disks) }
		if slices.ContainsFunc(r.pairs, known) {
			continue
		}
		if err := r.next.vm.takeOut(e.Guest, e.Disks); err != nil {
			return err
		}
	}
	return nil
}
