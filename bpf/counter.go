package bpf

import "fmt"

// Count is how many frames, and how many bytes in them.
type Count struct {
	Packets, Bytes uint64
}

// Counters has a count for each reason that occurred. A segmented frame counts once.
type Counters map[Reason]Count

// Counters returns what was counted for a sandbox, or, of id 0, for frames of no sandbox.
func (d *Datapath) Counters(id ID) (Counters, error) {
	if id != 0 {
		_, unlock, err := d.lock(id)
		if err != nil {
			return nil, err
		}
		defer unlock()
	}
	return d.counters(id)
}

func (d *Datapath) counters(id ID) (Counters, error) {
	var each []dpCounters // of a CPU
	if err := d.objs.Counters.Lookup(uint32(id), &each); err != nil {
		return nil, fmt.Errorf("read the counters of sandbox %d: %w", id, err)
	}
	counters := Counters{}
	for r := range reasons {
		var sum Count
		for i := range each {
			sum.Packets += each[i].Of[r].Packets
			sum.Bytes += each[i].Of[r].Bytes
		}
		if sum.Packets > 0 {
			counters[Reason(r)] = sum
		}
	}
	return counters, nil
}

func (d *Datapath) resetCounters(id ID) error {
	if err := d.objs.Counters.Put(uint32(id), make([]dpCounters, d.cpus)); err != nil {
		return fmt.Errorf("reset the counters of sandbox %d: %w", id, err)
	}
	return nil
}
