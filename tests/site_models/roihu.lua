-- What slurm.conf cannot say without an accounting database: an account is needed, and gpumedium gives a job at most 4 GPUs.
function slurm_job_submit(job, partitions, user)
    if job.account == nil then
        slurm.log_user("the model of Roihu: --account is missing")
        return slurm.ERROR
    end
    local gpus = tonumber(string.match(job.tres_per_node or "", "(%d+)$") or "0")
    if job.partition == "gpumedium" and job.min_nodes * gpus > 4 then
        slurm.log_user("the model of Roihu: gpumedium gives a job at most 4 GPUs")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
