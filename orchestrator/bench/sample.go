package bench

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// Row is what was measured of one operation. Times are of those that have worked, in milliseconds.
type Row struct {
	Operation string `json:"operation"`
	// Concurrency is how many were done at once, which is less than was asked for where there was no room for as many sandboxes.
	Concurrency int `json:"concurrency"`
	// Count is how many have worked, Failed how many haven't, Failures how many of these for each reason.
	Count    int            `json:"count"`
	Failed   int            `json:"failed"`
	Failures map[string]int `json:"failures,omitempty"`
	Mean     float64        `json:"meanMs"`
	P50      float64        `json:"p50Ms"`
	P95      float64        `json:"p95Ms"`
	P99      float64        `json:"p99Ms"`
	Max      float64        `json:"maxMs"`
	// Took is all of them, with what was done in between, such as the removal of sandboxes; PerSecond is Count in that time.
	Took      float64 `json:"tookMs"`
	PerSecond float64 `json:"perSecond"`
}

// sample is one operation as it is measured.
type sample struct {
	operation string
	at        int // once

	mu       sync.Mutex
	took     []time.Duration
	failures map[string]int
}

func newSample(operation string, at int) *sample {
	return &sample{operation: operation, at: at, failures: map[string]int{}}
}

// measure does it once.
func (s *sample) measure(do func() error) error {
	began := time.Now()
	err := do()
	took := time.Since(began)
	if err != nil {
		s.failed(err, 1)
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.took = append(s.took, took)
	return nil
}

// failed counts n failures for one reason.
func (s *sample) failed(err error, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures[reason(err)] += n
}

func (s *sample) row(took time.Duration) Row {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.took)
	r := Row{Operation: s.operation, Concurrency: s.at, Count: len(s.took), Failures: s.failures, Took: ms(took)}
	for _, n := range s.failures {
		r.Failed += n
	}
	if r.Count == 0 {
		return r
	}
	var sum time.Duration
	for _, d := range s.took {
		sum += d
	}
	r.Mean = ms(sum / time.Duration(r.Count))
	r.P50, r.P95, r.P99, r.Max = ms(quantile(s.took, .5)), ms(quantile(s.took, .95)), ms(quantile(s.took, .99)), ms(quantile(s.took, 1))
	r.PerSecond = float64(r.Count) / took.Seconds()
	return r
}

// quantile is the smallest of sorted durations that a part q of them doesn't exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

var (
	idForm     = regexp.MustCompile(`\b[a-z0-9]{16,}\b`)
	numberForm = regexp.MustCompile(`\d+(\.\d+)?`)
)

// maxReason bounds a reason's words, in bytes.
const maxReason = 160

// reason is why something has failed, without what is different each time.
func reason(err error) string {
	text := numberForm.ReplaceAllString(idForm.ReplaceAllString(err.Error(), "ID"), "N")
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "") + "…"
	}
	text = client.Printable(text)
	if status := client.Status(err); status != 0 {
		return fmt.Sprintf("%d: %s", status, text)
	}
	return text
}
