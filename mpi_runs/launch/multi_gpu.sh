#!/usr/bin/env bash
# All experiments over the GPUs of one machine, captured and eager, records and logs into a folder, within a time.
#
#   mpi_runs/launch/multi_gpu.sh FOLDER [--tp "2 4"] [--only "break-even draft"] [--seconds 480] [--dry-run]
#
# --tp: numbers of ranks, from 1 on; by default 2, 4 and 8, as far as there are GPUs. --only: experiments, in this order.
# --seconds: when it is over; what has not begun by then is told. --dry-run: no GPU, 4 ranks over host memory, the
# smallest sizes: whether all of it starts, writes its record and ends. Every run stands under a limit of its own.
# Exit code 1 if a run failed, had a wrong row or found no time.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
bin=$root/.venv/bin
python=$([ -x "$bin/python" ] && echo "$bin/python" || command -v python3)
mpirun=$([ -x "$bin/mpirun" ] && echo "$bin/mpirun" || command -v mpirun)

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

set -f # words of --tp and --only are no patterns of files
folder="" tps="" asked=no only="" seconds=480 dry=no
while [ $# -gt 0 ]; do
    case $1 in
        --tp | --only | --seconds)
            [ $# -ge 2 ] || usage
            case $1 in --tp) tps=$2 asked=yes ;; --only) only=$2 ;; *) seconds=$2 ;; esac
            shift ;;
        --dry-run) dry=yes ;;
        -*) usage ;;
        *) [ -z "$folder" ] || usage; folder=$1 ;;
    esac
    shift
done
[ -n "$folder" ] || usage
case $seconds in '' | *[!0-9]*) usage ;; esac
[ $asked = no ] || [ -n "${tps// /}" ] || usage
for tp in $tps; do
    case $tp in *[!0-9]* | 0*) echo "multi_gpu.sh: --tp has $tp; numbers of ranks from 1 on are accepted" >&2; usage ;; esac
done
mkdir -p "$folder" || exit 2

# NVLS takes multicast memory, which not every virtual machine gives; without it NCCL takes rings and trees.
export NCCL_NVLS_ENABLE=0
# Open MPI binds each of two ranks to a single core, on which Python and NCCL's threads then take turns.
export OMPI_MCA_hwloc_base_binding_policy=none

if [ $dry = yes ]; then
    tps=${tps:-4}
elif [ -z "$tps" ]; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
    for tp in 2 4 8; do [ "$tp" -le "$gpus" ] && tps="$tps $tp"; done
    [ -n "$tps" ] || { echo "multi_gpu.sh: $gpus GPUs; 2 are needed, or --dry-run" >&2; exit 2; }
fi

# What there is, the study of links first: these are the records that one GPU cannot give. With 2 and 4 ranks all but the
# last two take seven to eight minutes, by what each took with 2.
known=$("$python" -m vpa.run list | cut -d' ' -f1) || exit 2
if [ -z "$only" ]; then
    for name in break-even headline verify norm compare draft head; do
        grep -qx -- "$name" <<<"$known" && only="$only $name"
    done
fi

# The options of an experiment: fewer sizes of norm, for time; in a dry run the smallest sizes, or, of those not known
# here, its checks alone.
options() {
    if [ $dry = no ]; then
        [ "$1" = norm ] && echo "--rows 1,16,64,256,1024"
        return 0
    fi
    case $1 in
        break-even) echo "--rows 1,4" ;;
        headline | compare) echo "--rows 1 --vocab 3001 --dtype bf16" ;;
        draft) echo "--rows 1 --vocab 500 --draft-tokens 2" ;;
        verify) echo "--rows 1 --vocab 500 --dtype bf16" ;;
        norm) echo "--rows 1 --vocab 500 --hidden-sizes 64" ;;
        head) echo "--rows 1 --vocab 500" ;;
        *) echo "--check-only" ;;
    esac
}

start=$SECONDS
failed=0
# run NAME LIMIT RANKS ARGUMENTS...: one run, at most LIMIT seconds, into FOLDER/NAME.json and .log.
run() {
    local name=$1 limit=$2 ranks=$3 code began=$SECONDS
    shift 3
    local left=$((seconds - (SECONDS - start)))
    if [ "$left" -lt 5 ]; then
        echo "$name: not begun, time is up"
        failed=1
        return
    fi
    [ "$left" -lt "$limit" ] && limit=$left
    local launch=("$mpirun" -n "$ranks")
    [ "$ranks" = 1 ] && launch=()
    (cd "$root" && timeout --kill-after=10 "$limit" ${launch[@]+"${launch[@]}"} "$python" -m vpa.run "$@") \
        >"$folder/$name.log" 2>&1 </dev/null
    code=$?
    case $code in
        0) echo "$name: all tokens right, $((SECONDS - began)) s" ;;
        124 | 137) echo "$name: ended after $limit s, see $folder/$name.log" ;;
        *) echo "$name: exit code $code, see $folder/$name.log"; tail -n 3 "$folder/$name.log" ;;
    esac
    [ $code = 0 ] || failed=1
}

folder=$(cd "$folder" && pwd)
for experiment in $only; do
    comm=$([ $dry = yes ] && echo "--comm mpi --backend numpy" || echo "--comm nccl")
    if [ "$experiment" = compare ]; then # one process, which plays the ranks; with no gather it needs no second GPU
        # shellcheck disable=SC2046
        run compare 120 1 compare $([ $dry = yes ] && echo "--backend numpy") $(options compare) --json "$folder/compare.json"
        continue
    fi
    for tp in $tps; do
        if [ "$experiment" = break-even ]; then # a record for each shape: one that takes too long costs no other
            for shape in $([ $dry = yes ] && echo 16x500 || echo glm-5.2 deepseek-v3); do
                # shellcheck disable=SC2046,SC2086
                run "break_even_${shape}_tp$tp" 100 "$tp" break-even $comm --shape "$shape" $(options break-even) \
                    --json "$folder/break_even_${shape}_tp$tp.json"
            done
            continue
        fi
        name=${experiment//-/_}_tp$tp
        # shellcheck disable=SC2046,SC2086
        run "$name" 90 "$tp" "$experiment" $comm $(options "$experiment") --json "$folder/$name.json"
    done
done
echo "$((SECONDS - start)) s; records in $folder"
exit $failed
