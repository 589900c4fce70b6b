package probe

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// Result is what was found out. Numbers are of sandboxes of the template, on top of what there was.
type Result struct {
	Template string `json:"template"`
	Profile  string `json:"profile"`
	Steps    []Step `json:"steps"`
	// Bound is what 95 of 100 runs might take, 0 if nothing was measured.
	Bound time.Duration `json:"p95BoundNanoseconds"`
	// Ended says what has ended it.
	Ended string `json:"ended"`
	// Admission is how many there is room for by what is reserved, and Short what there isn't enough of for more.
	Admission int    `json:"byAdmission"`
	Short     string `json:"short"`
	// Load is how many have worked as they should. Open: nothing has shown that it couldn't be more.
	Load int  `json:"byLoad"`
	Open bool `json:"loadOpen"`
	// Memory is how many the host's memory holds, with PerSandbox bytes for each more, as it was measured; 0 where that is too little
	// to be told from what else goes on.
	Memory     int   `json:"byMemory"`
	PerSandbox int64 `json:"memoryPerSandbox"`
	// Worst is how many it holds where each takes all that its control group lets it.
	Worst int `json:"byMemoryLimit"`
	// Disagree says where these differ by more than a tenth, and what to do about it.
	Disagree []string `json:"disagree"`
}

// outsideMemory is about what a machine's control group lets it have beside its memory: package vmm/qemu's share for its process.
const outsideMemory = 96 << 20

// bound is what 95 of 100 runs may take.
func (p *probe) bound(first Step) time.Duration {
	if p.P95 > 0 {
		return p.P95
	}
	return time.Duration(float64(first.P50) * p.Factor)
}

// tooMuch says so if the last step was.
func (p *probe) tooMuch(steps []Step) end {
	s, bound := steps[len(steps)-1], p.bound(steps[0])
	if s.P95 > bound {
		return end{tooMuch, fmt.Sprintf("with %d sandboxes 95 of 100 runs take up to %v, more than %v", s.Sandboxes, s.P95.Round(time.Millisecond), bound.Round(time.Millisecond))}
	}
	if s.Pressure == nil {
		return end{}
	}
	for _, of := range []struct {
		what     string
		is, most float64
	}{{"CPU", s.Pressure.CPU, p.CPU}, {"memory", s.Pressure.Memory, p.Memory}, {"I/O", s.Pressure.IO, p.IO}} {
		if of.most > 0 && of.is >= of.most {
			return end{tooMuch, fmt.Sprintf("with %d sandboxes something has waited for %s in %.0f %% of ten seconds, and %.0f %% is too much", s.Sandboxes, of.what, of.is, of.most)}
		}
	}
	return end{}
}

// conclude makes the numbers of what was measured.
func (p *probe) conclude(before client.Capacity, steps []Step, ended end) Result {
	room := before.Templates[0]
	r := Result{Template: p.Template, Profile: room.Profile, Steps: steps, Ended: ended.why, Admission: room.Count, Short: room.Short, Disagree: []string{}}
	r.Open = ended.kind == refused || ended.kind == most
	good := steps
	if ended.kind == tooMuch {
		good = steps[:len(steps)-1]
	}
	if len(good) > 0 {
		r.Load = good[len(good)-1].Sandboxes
	}
	if len(steps) > 0 {
		r.Bound = p.bound(steps[0])
		each, rest := memory(int64(before.Memory.Used), steps)
		if r.PerSandbox = each; each > 0 {
			r.Memory = int(max(before.Memory.Total-float64(rest), 0) / float64(each))
		}
	}
	free := before.Memory.Total - before.Memory.Used
	r.Worst = int(max(free, 0) / float64(int64(room.MemoryMB)<<20+outsideMemory))
	r.compare(room, before)
	return r
}

// memory tells what each more of the sandboxes takes of the host's, and what is used beside that: the first one has what all of them
// share be there, too. They are medians, of the slopes between all steps and of what that leaves of each, which a step that somebody
// else was busy in doesn't change by much.
func memory(before int64, steps []Step) (each, rest int64) {
	if len(steps) == 1 {
		return max((steps[0].Memory-before)/int64(steps[0].Sandboxes), 0), before
	}
	var slopes, rests []int64
	for i, b := range steps {
		for _, a := range steps[:i] {
			slopes = append(slopes, (b.Memory-a.Memory)/int64(b.Sandboxes-a.Sandboxes))
		}
	}
	if each = median(slopes); each <= 0 {
		return 0, before
	}
	for _, s := range steps {
		rests = append(rests, s.Memory-each*int64(s.Sandboxes))
	}
	return each, median(rests)
}

func median(all []int64) int64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// disposable is the profile that factors are of.
const disposable = "disposable"

// apart tells whether two numbers differ by more than a tenth.
func apart(a, b int) bool {
	return math.Abs(float64(a-b)) > 0.1*float64(max(a, b))
}

// compare says where the numbers disagree.
func (r *Result) compare(room client.Room, before client.Capacity) {
	say := func(format string, args ...any) { r.Disagree = append(r.Disagree, fmt.Sprintf(format, args...)) }
	switch {
	case r.Load == 0:
	case r.Open && r.Admission > r.Load && apart(r.Admission, r.Load):
		say("admission has room for %d, but the probe ended at %d with the load still carried: %s", r.Admission, r.Load, r.Ended)
	case !r.Open && apart(r.Admission, r.Load):
		hint := ""
		factor := math.Ceil(10*float64(r.Load*room.CPUs)/before.CPU.Total) / 10 // rounded up, for as many to be let in
		if room.Profile == disposable && factor >= 1 {
			hint = fmt.Sprintf(": admission.cpu_overcommit = %.1f would let in as many as this load allows", factor)
		}
		say("admission has room for %d, and %d carry this load%s", r.Admission, r.Load, hint)
	}
	if r.Memory > 0 && r.Memory < r.Admission && apart(r.Admission, r.Memory) && room.Profile == disposable {
		say("admission has room for %d, and the host's memory for %d of %d MiB each: raise admission.disposable_memory, or lower admission.memory_overcommit, until %d MiB are reserved for each", r.Admission, r.Memory, r.PerSandbox>>20, r.PerSandbox>>20)
	}
	if r.Worst < r.Admission && apart(r.Admission, r.Worst) {
		say("if each of %d took all the memory that it may, the host would hold %d: have those resident that mustn't be ended then", r.Admission, r.Worst)
	}
}

// percentile is the nearest rank, 0 of nothing.
func percentile(all []time.Duration, p int) time.Duration {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max((len(sorted)*p+99)/100-1, 0)]
}
